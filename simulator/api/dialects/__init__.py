"""The engines' own endpoints beside OpenAI's, a module each."""
