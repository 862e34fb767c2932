"""Starting training runs; knows neither torch nor Megatron before a run is to start."""
