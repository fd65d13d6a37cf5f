"""How objects travel between the notebook and its ranks.

Its doors are `jupyter_ddp.capture` (out) and `jupyter_ddp.values` (in, and back).
"""
