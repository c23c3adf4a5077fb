"""A small, real RL training run that is killed on purpose: what ``arrowbank demo`` runs."""
