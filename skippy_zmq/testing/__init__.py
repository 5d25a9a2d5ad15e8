"""Tools for tests and benchmarks of pipelines; the product itself imports none of them.

Owns: links that are slower, longer or less reliable than those of this machine (``link_proxy``, its event loop ``pump``
and the arithmetic of ``shaping``). Works on plain byte streams and knows nothing of ZeroMQ or of the protocol above it.
Does not own: models, stages or measurements.
"""
