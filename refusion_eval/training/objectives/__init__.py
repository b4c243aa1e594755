"""Training objectives: what is fed, what is predicted, and the loss."""
