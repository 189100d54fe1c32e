"""While loops with derivatives in reverse mode: bounded (`while_loop`), and of nets, without a bound (`trips`).

In: a condition and a body. Out: the last state, with derivatives. Read `while_loop.py` first.
"""
