"""The sample prompts, as a package so that they are found in every kind of installation."""
