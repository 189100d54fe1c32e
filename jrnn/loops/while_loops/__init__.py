"""While loops with derivatives in reverse mode: bounded (`while_loop`), and of nets, without a bound (`trips`)."""
