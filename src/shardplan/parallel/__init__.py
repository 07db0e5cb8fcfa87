"""What runs in training: collectives at the edges, parameters read locally, gradients summed over tp."""
