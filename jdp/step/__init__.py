"""Step: a train step of one replica becomes the compiled step of all of them."""
