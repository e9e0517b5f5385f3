"""How the weights of a model are held: packed for a CPU, merged for a GPU, a rank's part of them, as it was loaded."""
