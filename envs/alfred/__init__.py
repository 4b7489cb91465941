"""What the worlds household and alfworld share: records, the game in pure Python, its tasks, the expert."""
