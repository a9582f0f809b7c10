"""Text to token ids and back, for any room: the shipped vocabulary, other tokenizer files, and chat templates.

`base` has the interface of a tokenizer, `file` its one implementation; `shipped/` is the vocabulary that needs no
download, in the folder format of Hugging Face's libraries, and `build` writes that folder from words.txt.
"""
