"""The recipe `seq2seq`: its pairs of strings, an encoder-decoder with attention, and beam search."""
