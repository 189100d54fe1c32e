"""The cost model: what a processor is, what equations and loops cost, the choice among ways, and what was measured."""
