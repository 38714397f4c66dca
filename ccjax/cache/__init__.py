"""The chunk-cache: which variants there are, in which tier each is kept, how a prefill loads them, and what is captured
of what it computed. Runs nothing itself; the engine does.
"""
