"""HTTP: OpenAI's API and fastgen's own, as an ASGI application."""
