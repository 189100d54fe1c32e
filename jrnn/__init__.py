"""jrnn: a JAX-compiled functional engine for recurrent networks."""
