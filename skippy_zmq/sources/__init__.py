"""Where weights come from: GGUF files, checked strictly before native code sees them.

Owns: reading and judging model files (header, tensor table, metadata, vocabulary), joining the shards of a model into
one virtual file, and the identity of a model. llama.cpp aborts or reads out of bounds on some bad files, so whatever
``open_model`` returns must be safe to hand to it.
Does not own: running a model, placing weights on devices, mapping files into memory, or downloading.
"""
