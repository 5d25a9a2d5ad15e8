"""``python -m skippy_zmq.certify``: proves that a model cut into stages answers bit for bit as the uncut model.

Owns: the workload that is compared, the unsplit reference (llama.cpp through llama-cpp-python), the staged run, the
child processes that keep a crash away from the rest, and the reports (JSON, docs/architectures.md, certified.json).
Does not own: how a stage runs (``runtime``), whether stages fit together (``stage.handshake``), or what a stage does
with the table (``stage.facts``).
"""
