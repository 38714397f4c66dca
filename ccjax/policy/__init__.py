"""Pure decisions of ccjax: what to reuse, recompute, store and evict."""
