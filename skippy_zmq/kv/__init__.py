"""Attention state of a session as pages: what a page is, how pages are cut and joined, and where they are kept.

Pure of sockets and of the model: nothing here reads or writes a lane. docs/kv-pages.md describes the formats.
"""
