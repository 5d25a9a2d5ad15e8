"""Hugging Face checkpoints, opened as the GGUF model that llama.cpp's converter would write from them.

Owns: the files of a checkpoint folder and their checks, the settings in ``config.json``, the tokenizer, the names,
shapes, types and transforms of the tensors, and reading their rows. No GGUF file is written: a checkpoint is a header
in memory and a way to read rows, which ``gguf_model.open_header`` takes like any other header.
Does not own: quantizing, placing weights on devices, downloading.

Rules where a folder is ambiguous:

- An index (``model.safetensors.index.json``) beside a ``model.safetensors`` that it does not list is refused; naming
  one of the two files instead of the folder says which is meant.
- ``tie_word_embeddings`` decides, as it does for transformers: where it is true a separate ``lm_head`` is left out,
  with a warning; where it is false ``lm_head`` must be there.
- A ``quantization_config`` that is not null is refused, whatever the tensors look like.
- A symbolic link may lead out of the folder only into the ``blobs`` of the hub cache that the folder belongs to.
"""
