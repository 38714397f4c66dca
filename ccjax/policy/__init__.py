"""Pure decisions of ccjax: what to reuse, recompute, keep and evict. It knows no array, clock, file or device."""
