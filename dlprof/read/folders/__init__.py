"""What a folder of other tools' files holds beside what is read: windows of a job, and files of no known format."""
