"""Owns how chat messages become a prompt: the model's own template, rendered in a process of its own, and the BOS rule.

It neither tokenizes nor reads model files, and never runs a template in the calling process. ``renderer`` is what a
stage uses, ``worker`` the child process, ``sandbox`` the engine inside it, ``bos`` the rule for the first token.
"""
