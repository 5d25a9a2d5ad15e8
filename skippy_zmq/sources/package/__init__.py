"""Layer packages: a folder with a manifest, ``model-package.json``, and GGUF parts, of which a stage opens its own.

Owns: the manifest and its checks, which tensor belongs into which part, building, verifying, composing, and opening the
parts of one stage beside stand-ins for the others. docs/packages.md describes the format.
Does not own: what the parts mean (the GGUF modules beside), downloading, or running a model.
"""
