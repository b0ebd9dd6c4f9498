"""genba beside its peers: what installs, starts, measures and tells.  The peers themselves are in `peers`."""
