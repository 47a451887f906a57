"""An OpenAI-compatible server over one engine: steering, captures and readings per request, and a page."""
