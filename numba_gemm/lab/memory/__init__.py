"""Memory laboratory: predicted and measured costs of each data path of a GPU, one file per experiment."""
