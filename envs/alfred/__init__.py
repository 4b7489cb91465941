"""Parts shared by the environments household and alfworld: records, the game, its tasks, the expert."""
