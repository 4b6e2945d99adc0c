"""From text to batches: tokenise, the token store, the order of samples, the batches of a step."""
