"""Programs over the library: generate, chat."""
