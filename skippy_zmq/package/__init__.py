"""``python -m skippy_zmq.package``: build, inspect, verify and compose layer packages.

Owns the command line and what it prints. Everything about the packages themselves is in ``skippy_zmq.sources.package``.
"""
