"""How loops will run: the plans of a program, and its memory.

In: a function, or what is lowered in a context. Out: an `Explanation`, which prints plans. Read `explain.py` first.
"""
