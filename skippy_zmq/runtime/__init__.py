"""Running a stage: options, the opened model, its lanes, sampling. The only importer of the native extension.

Owns native handles and checks that what llama.cpp says no to becomes an error of ours. Does not own files
(``sources``), messages (``wire``), sockets (``transport``) or what to run next (``schedule``, ``stage``).
"""
