"""Tensors that a stage made of a checkpoint, kept on disk: the next start maps them instead of making them again.

Owns: what identifies them, the file they lie in (a GGUF file of one stage's tensors), writing it while a stage loads,
checking it before it is used, and how much a folder may hold.
Does not own: how tensors are made, and opening them for llama.cpp.

An entry is trusted for the time that it says what it must: its header is compared with the one that the checkpoint
gives now, and every tensor with its checksum, at every start. Whoever can write the folder can still forge both.
"""
