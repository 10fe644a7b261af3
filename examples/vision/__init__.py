"""A vision-language model learns to name colours."""
