"""Scripts that leave the training to a library, with one mistake each."""
