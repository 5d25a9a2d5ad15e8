"""Where weights come from: GGUF files, checked strictly before native code sees them, here or on a hub.

Owns: what a model argument names, and fetching what a stage needs of it; reading and judging model files (header,
tensor table, metadata, vocabulary), joining the shards of a model into one virtual file, and the identity of a model.
llama.cpp aborts or reads out of bounds on some bad files, so what ``open_model`` returns must be safe to hand to it.
Does not own: running a model, placing weights on devices, mapping files into memory, or how a hub's files travel
(huggingface_hub).
"""
