"""Is a node fit for a run? Its GPUs' errors and links, and what its all-reduce and clocks reach."""
