"""The stage program: one process that holds a range of layers and runs what arrives.

Owns the event loop, the handshake between neighbours, admission of requests (stage 0) and sampling (last stage). Does
not own sockets (``transport``), message layout (``wire``), batching policy (``schedule``) or native code (``runtime``).
"""
