"""Text to token ids and back, for any room: the shipped vocabulary, others' tokenizer files, and chat templates.

`base` has what a tokenizer can do, `file` is the one implementation of it; `shipped/` is the vocabulary that needs no
download, as the folder that Hugging Face's libraries load, and `build` writes that folder from words.txt.
"""

if __name__ != "lorrery.tokenizer":
    raise ImportError("this is lorrery.tokenizer: a second copy under the name " + __name__ + " would not be the same")
