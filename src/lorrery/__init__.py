"""A working model of a multi-tenant LoRA inference cluster that needs no GPU.

The rooms lie at the top of the repository; the links beside this file make them parts of this one package, and a wheel
holds them as folders. docs/architecture.md says what each is for.
"""
