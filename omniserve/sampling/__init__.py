"""The steps that turn logits into text: sampling, log-probabilities, grammars, detokenizing."""
