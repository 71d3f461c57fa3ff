"""Programs that train and evaluate a ViT; run from a checkout, not part of the wheel."""
