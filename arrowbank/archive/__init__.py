"""The cold path: settled and evicted groups as Parquet, and one view of everything a bank holds."""
