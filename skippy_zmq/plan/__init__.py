"""Where to cut a model: layer ranges that fit the memory of their machines and take equally long.

Owns: what each layer costs in memory and in time, by the model's tensor table and metadata alone, and the best
contiguous partition. Does not own: loading anything, measuring anything, starting stages.
"""
