"""The endpoint of an engine: OpenAI's protocol over HTTP. Not here: the engine, and who starts both (`commands`)."""
