"""The wire protocol: message values, limits and the codec between them and frames.

Owns what bytes mean and which bytes are refused; docs/protocol.md is the contract. Owns no socket, no clock, no thread
and no state of a conversation: which message may follow which is the business of ``stage`` and ``client``.
"""
