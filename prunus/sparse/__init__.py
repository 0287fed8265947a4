"""Running sparse models: weights kept sparse in memory, products with them, and advice on when they are faster."""
