"""Tables and figures of results: averages, tests and pictures of what the library computed."""
