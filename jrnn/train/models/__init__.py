"""Models: pure functions that a task trains, made as a net, as jrnn.nn layers, or read from a net on disk."""
