"""The cost model: what a processor is, what equations and loops cost, and the choice among ways."""
