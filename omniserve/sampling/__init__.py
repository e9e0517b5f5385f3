"""From logits to text: sampling, log-probabilities, grammars, detokenizing."""
